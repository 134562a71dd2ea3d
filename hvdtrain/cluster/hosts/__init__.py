"""Hosts: names, addresses, one ssh session each, and what is said through it."""
