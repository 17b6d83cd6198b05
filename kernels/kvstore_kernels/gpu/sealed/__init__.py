"""The host side of the CUDA kernels of codecs that quantize whole blocks: a table's tail and step, and the launches."""
