"""One file per op of a round or a forward; import each from its own file."""
