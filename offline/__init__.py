"""Tools that need no gateway: bundles of layouts, published models, the simulator, charts."""
