"""Plain traffic, whose clients say nothing about it: how much of that Kedge finds by itself."""
