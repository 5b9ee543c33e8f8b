"""The exchange between ranks that step together: links, frames, and the collectives over them."""
