"""weightcast: weight sync from an RL trainer to its inference engines that can prove it wrote every slot."""

__version__ = "0.1.0"
