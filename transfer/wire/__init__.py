"""Messages between ranks and gateway, as bytes.

- `messages`: rank reports, plan parts and digests, encoded and decoded
- `tables`: tensor tables and boxes in messages, with their checks
- `frames`: bytes of one message: header, columns, compression, size limits
- `integers`: columns of integers in few bytes
"""
