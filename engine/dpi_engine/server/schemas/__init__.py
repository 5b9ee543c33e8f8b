"""Bodies of the HTTP API as msgspec structs, one file per endpoint family."""
