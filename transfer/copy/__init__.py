"""Copies inside one process, prepared once and made in every update.

`batch` makes them with few calls, and `runs` moves many runs of a CPU's memory by one call. `spacing` finds runs at one
distance, and `nan` gives every NaN that a cast makes the same bits.
"""
