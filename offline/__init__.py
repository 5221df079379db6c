"""Tools that need no gateway.

`bundle` reads layouts from a file and turns plans into JSON; `models` makes the layouts of published models. `simulate`
predicts the time of a plan, and `chart` draws it.
"""
