"""From a recipe in TOML to a typed launch: schema, arguments, memory plan, router settings, the vLLM side."""
