"""Proofs of a plan: its invariants, checked from its columns and the tables alone.

`operations` proves what ranks write and read, `digests` what they digest, and `relays` that no relays wait for each
other. `tiling` has the checks that these share.
"""
