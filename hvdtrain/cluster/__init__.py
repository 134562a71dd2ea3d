"""Many hosts: starting ranks on them over ssh, and finding out what is wrong with them.

`hosts` `addresses` `environment` `protocol` are pure; `ssh` reaches a host; `agent` runs on each host and keeps its
ranks; `starter` runs a job from here through the agents; `launch` `doctor` `verify` are the commands. No framework is
imported here.
"""
