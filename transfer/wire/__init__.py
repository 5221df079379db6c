"""Messages between ranks and gateway, as bytes.

`messages` encodes and decodes rank reports, parts of plans and digests. `frames` has the bytes of one message,
`integers` those of one column, and `tables` the checks of tensor tables and boxes.
"""
