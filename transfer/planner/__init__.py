"""The planner: who sends which box to whom, directly or through relays."""
