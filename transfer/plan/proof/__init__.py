"""Proofs of a plan: its invariants, checked operation by operation."""
