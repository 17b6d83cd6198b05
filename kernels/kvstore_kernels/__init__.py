"""Block layout, checksum, codecs and attention over blocks. Importing this package imports no torch."""
