"""Many hosts: reached by ssh, examined, and given ranks.

`launch` starts ranks on the hosts and ends them together. `doctor` finds faults of the hosts. `verify` trains a toy
model on them. This package imports no framework.
"""
