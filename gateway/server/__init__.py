"""The HTTP server of the gateway: application, routes, tokens, and the process that serves them.

- `run`: HTTP server for the application, from the command line or in an actor, and its memory
- `ray_actor`: gateway as a named actor of Ray
- `app`: the application: table of routes and guard put together
- `guard`: token, scope and size of each request, checked before any route
- `tokens`: bearer tokens with their scopes, and the throttle of wrong guesses
- `routing`: table of all routes, and the dispatch of requests to them
- `routes`: routes for people and programs: pairs, instances, updates
- `rank_routes`: routes for ranks: reports, orders, digests, heartbeats
- `openapi`: OpenAPI document of all routes
- `requests`: requests and replies, read and checked without a web framework
- `bodies`: JSON bodies of ranks' requests, with strict types
- `logs`: logs as JSON lines or as text
"""
