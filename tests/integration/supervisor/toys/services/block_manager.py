from services.toy import run

run("block_manager")
