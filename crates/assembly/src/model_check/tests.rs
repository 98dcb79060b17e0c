use super::*;
use std::os::unix::fs::PermissionsExt;

/// A checker whose child is a shell script.
fn checker(script: &str, settings: CheckSettings) -> (tempfile::TempDir, ModelChecker) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("child");
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    (folder, ModelChecker::with_program(settings, path))
}

fn check(script: &str, settings: CheckSettings) -> Result<(), LoadError> {
    let (_folder, checker) = checker(script, settings);
    checker.check(b"model", &ModelConfig::default(), &AtomicBool::new(false))
}

fn short() -> CheckSettings {
    CheckSettings { limit: Duration::from_millis(300), ..CheckSettings::default() }
}

fn refused(result: Result<(), LoadError>) -> String {
    match result {
        Err(LoadError::Invalid(why)) => why,
        other => panic!("{other:?}"),
    }
}

#[test]
fn verdicts_are_passed_on() {
    let say = |line: &str, code: u8| {
        check(&format!("cat >/dev/null; echo '{line}'; exit {code}"), CheckSettings::default())
    };
    assert_eq!(say(r#"{"passed":{"landlock":true}}"#, 0), Ok(()));
    assert_eq!(refused(say(r#"{"invalid":"no nodes"}"#, 1)), "no nodes");
    let unsupported = say(r#"{"unsupported":"Magic"}"#, 1);
    assert_eq!(unsupported, Err(LoadError::Unsupported("Magic".to_string())));
    let failed = say(r#"{"failed":"no seccomp"}"#, 1).unwrap_err();
    assert!(failed.to_string().contains("--model-check off"), "{failed}");
    // A child that says it passed, but did not end well, did not pass.
    refused(say(r#"{"passed":{"landlock":true}}"#, 3));
    refused(say("nonsense", 0));
}

#[test]
fn a_crash_is_named_with_its_stage() {
    let script = r#"cat >/dev/null; echo '{"stage":"measure"}'
        echo 'memory allocation of 99 bytes failed' >&2; kill -ABRT $$"#;
    let why = refused(check(script, CheckSettings::default()));
    assert!(why.contains("aborted while it ran the model: memory allocation of 99 bytes"), "{why}");
    assert!(why.contains("--model-check-memory"), "{why}");
}

#[test]
fn endless_checks_are_ended() {
    let started = Instant::now();
    // A shell's child would keep the pipes open.
    let why = refused(check("exec sleep 60", short()));
    assert!(why.contains("--model-check-secs"), "{why}");
    let endless = r#"echo '{"stage":"run"}'; exec sleep 60"#;
    refused(check(endless, short()));
    let compiled_only = CheckSettings { run_must_finish: false, ..short() };
    assert_eq!(check(endless, compiled_only), Ok(()));
    refused(check("exec yes", short()));
    assert!(started.elapsed() < Duration::from_secs(30));
}

#[test]
fn a_cancelled_check_ends_at_once() {
    let (_folder, checker) = checker("exec sleep 60", CheckSettings::default());
    let started = Instant::now();
    let cancelled = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let check = || checker.check(b"model", &ModelConfig::default(), &cancelled);
        // More than run at once: some wait for their turn.
        let checks: Vec<_> = (0..4).map(|_| scope.spawn(check)).collect();
        std::thread::sleep(Duration::from_millis(50));
        cancelled.store(true, Ordering::SeqCst);
        for check in checks {
            assert!(matches!(check.join().unwrap(), Err(LoadError::Unavailable(_))));
        }
    });
    checker.stop();
    let never = AtomicBool::new(false);
    assert!(checker.check(b"model", &ModelConfig::default(), &never).is_err());
    assert!(started.elapsed() < Duration::from_secs(30));
}
