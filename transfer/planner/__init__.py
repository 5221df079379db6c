"""The planner: ranks that send boxes, and ranks that receive them, directly or through relays.

- `replan`: `Planner`, plans of one pair one after the other, with unchanged layers kept
- `changes`: layers and tables that changed since the last plan
- `planner`: `plan_transfer`, a plan from the tables of both sides
- `receives`: boxes that each rank of an instance receives
- `holders`: trainer ranks that hold a cell, and the choice of senders among them
- `locality`: holders narrowed to the receiver's host
- `expected`: load on trainer ranks that each layer is expected to bring
- `assign`: senders chosen layer by layer, so that a change stays local
- `waterfill`: lowest level that the load of the busiest rank can have
- `routes`: route of each box: from a trainer rank, or from a rank that relays it
- `relay_trees`: chains and trees of relays among inference ranks
- `topology`: links, hosts and transfer times: the cost model
- `rows`: rows of the finished plan
"""
