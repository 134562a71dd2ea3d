"""Hosts are asked, and what they answer is judged."""
