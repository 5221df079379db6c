"""Layouts of ranks: the tensors and regions that a rank holds, and the memory behind them.

- `dtypes`: element types by name, code and size, and casts that are allowed
- `tables`: logical tensors and regions of one rank in columns, and its report
- `memory`: memory of a rank's regions, and the builder of its layout
- `placement`: expert placements: logical expert of each physical slot
- `joined`: tables of many ranks joined, for a side or a pair
- `coverage`: check that every logical tensor is held whole
- `dispatch`: audit that token dispatchers choose only slots that hold their expert
- `tensor_names`: layer and expert numbers in checkpoint names
- `summaries`: many tensor names summarized in one line
"""
