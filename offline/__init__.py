"""Tools that need no gateway: plans from a file, and the time that they would take.

- `bundle`: layout bundle in JSON or msgpack, read; a plan as JSON
- `models`: layouts of published models for given parallel sizes
- `simulate`: predicted time of a plan on a topology, its busiest link, and a lower bound
- `chart`: load per rank of a simulation, drawn as HTML with SVG
"""
