"""Colocated training: trainer and engine have the memory of one device by turns.

`cycle` runs the steps of an iteration in order. `engine_memory` asks an engine to give up memory and to take it back.

- `cycle`: `ColocatedCycle`, the order of pause, release, train, transfer and resume
- `engine_memory`: engines that release and resume memory by their own API
"""
