"""asyncio around ``wire``: connections, dialling, listening. Runs on both sides; decides nothing about what messages mean."""
