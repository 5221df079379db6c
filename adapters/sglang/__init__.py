"""SGLang engines as sinks: `plugin` serves weight updates inside schedulers, `sink` describes the model of a rank.

`experts` and `slots` describe expert layers, and `caches` drops what old weights have computed. `ray_actors` brings the
plugin into schedulers that are actors of Ray.
"""
