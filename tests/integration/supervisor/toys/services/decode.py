from services.toy import run

run("decode")
