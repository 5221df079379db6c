"""Transfer plans: all operations of a pair, and the part of them that each rank gets.

- `operations`: `TransferPlan`, the columns of a plan, and `RankPart`, the rows of one rank
- `stages`: stages in which relays pass boxes on
- `verification`: elements that an update digests: all, a sample, or none
- `proof`: proof of a plan's invariants
- `parts`: parts of single ranks, cut out of a plan
- `traffic`: bytes that each rank sends, receives and copies
- `digest_report`: `DigestReport`, the digests of one rank in an update
"""
