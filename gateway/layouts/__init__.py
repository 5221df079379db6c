"""Layouts of whole sides: merged from the reports of ranks, checked, inspected, and their digests compared.

- `merge`: reports of all ranks merged into the layout of an instance or of the trainer
- `experts`: check of an instance's expert slots against its placement
- `inspection`: tables of `weightcast inspect`: slots, replicas, same-rank pairs
- `digest_check`: digests of trainer and instance compared after an update
"""
