"""Triton kernels: device code only. What launches them lies one folder up; what they must equal are the CPU functions.

All of them find blocks through an int64 table of addresses [rows, width] and read `targets`, int64 [3, rows]: how many
positions of a row are padding, its token index of the first fresh token, and how many tokens it has.
"""
