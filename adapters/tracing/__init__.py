"""A tracer of engines' weight loaders: which boxes of checkpoint tensors they write into which parameters.

`trace` runs a loader under `dispatch_mode`; `recorder` turns its writes into regions, by the arithmetic of `strided`.
`derived` finds tensors computed beside parameters, `replay` recomputes them, and `snapshot` puts the model back.
"""
