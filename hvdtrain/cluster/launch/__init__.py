"""Ranks on many hosts: started, watched, ended together."""
