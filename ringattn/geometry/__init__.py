"""What is where, and what is live: spans, layouts, masks, and the plan that intersects them into tiles."""
