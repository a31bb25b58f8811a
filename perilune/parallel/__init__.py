"""Several processes on one model: `mesh` (which rank stands where), `expert` (balanced experts), `beside`."""

__all__: list[str] = []
