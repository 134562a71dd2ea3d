"""Many hosts: names, addresses, one ssh session a host, and the messages through it.

`launch` starts ranks on the hosts and ends them together. `doctor` finds faults of the hosts. `verify` trains a toy
model on them. This package imports no framework.
"""
