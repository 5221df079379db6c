"""Messages that the ranks of an update exchange, and the rounds in which they move.

`messages` cuts the boxes of two ranks into messages, and `messages_in_memory` finds all messages of one rank in its
memory. `schedule` prepares the tensors and copies of each round.
"""
