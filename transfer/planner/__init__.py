"""The planner: ranks that send boxes, and ranks that receive them, directly or through relays.

- `planner`: `plan_transfer`, a plan from the tables of both sides
- `receives`: boxes that each rank of an instance receives
- `holders`: trainer ranks that hold a cell
- `locality`: holders narrowed to the receiver's host
- `assign`: a sender for each box, boxes cut where whole ones are too large
- `waterfill`: lowest level that the load of the busiest rank can have
- `routes`: route of each box: from a trainer rank, or from a rank that relays it
- `relay_trees`: chains and trees of relays among inference ranks
- `topology`: links, hosts and transfer times: the cost model
- `rows`: rows of the finished plan
"""
