"""How ranks reach one another: engines, arrival, the line to the host's agent, and what an elastic job says."""
