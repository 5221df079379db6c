"""Proof of a plan: its invariants, checked from its columns and the tables alone.

- `operations`: `check_plan`: each byte of each region is written once, from a rank that holds it
- `relays`: each relay passes on what its rank has received by then
- `digests`: digest rows cover each element once
- `tiling`: checks that boxes lie in their regions and fill them, shared by the others
"""
