"""Kedge for frameworks that people already use. Nothing outside of this room imports it.

Each module needs only the packages that it names, and says which extra brings them: `kedge.integrations.langgraph`,
`kedge.integrations.openai_agents`, `kedge.integrations.openai_client`.
"""
