"""Which rank holds which positions, and which pairs are live: spans, layouts, masks, and the plan that intersects them into tiles."""
