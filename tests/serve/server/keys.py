"""Keys of the two tenants that tests know."""

KEYS = ("key-of-alice", "key-of-bob")
