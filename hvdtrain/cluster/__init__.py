"""Many hosts: names, addresses, one ssh session a host, and the messages through it.

`launch` starts ranks on them and ends them together, `doctor` says what is wrong with them, `verify` trains a toy
there. No framework is imported here.
"""
