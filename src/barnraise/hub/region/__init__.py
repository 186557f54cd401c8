"""Regional hubs: hierarchical aggregation, with the regional hub as a member of its parent hub."""
