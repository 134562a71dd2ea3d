"""How ranks reach one another: engines, arrival, the line to the host's agent, and an elastic job's messages."""
