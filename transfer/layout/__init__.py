"""Layouts of ranks: the tensors and regions that a rank holds, and the memory behind them.

`tables` and `memory` describe one rank, `joined` all ranks of a side or a pair, `placement` the slots of experts.
`coverage` and `dispatch` check them.
"""
