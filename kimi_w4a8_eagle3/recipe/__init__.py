"""Recipes in TOML and the typed launch they become: schema, arguments, memory plan."""
