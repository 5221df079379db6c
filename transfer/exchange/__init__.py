"""Messages that ranks exchange in an update, and the rounds in which they move.

- `messages`: boxes of two ranks cut into messages, and messages assigned to rounds
- `messages_in_memory`: all messages of one rank, with the memory of each box
- `schedule`: tensors and copies of each round, prepared
"""
