from services.toy import run

run("mover")
