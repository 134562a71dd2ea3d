"""Hosts: names, addresses, one ssh session each, and the messages through it."""
