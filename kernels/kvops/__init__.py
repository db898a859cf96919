"""Operations on paged KV caches, behind one interface for every device."""
