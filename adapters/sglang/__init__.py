"""SGLang: its model as a sink, and the plugin inside its schedulers."""
