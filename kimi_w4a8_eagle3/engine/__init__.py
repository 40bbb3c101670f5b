"""One engine process, seen from outside: start it, query it, measure it, watch it, and remove what it leaves behind."""
