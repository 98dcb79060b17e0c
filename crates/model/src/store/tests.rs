use super::*;

fn config() -> ModelConfig {
    ModelConfig::default()
}

fn names(folder: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort_unstable();
    names
}

#[test]
fn versions_count_up_and_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    assert_eq!(store.register("m", b"one", config()).unwrap().version, 1);
    let second = store.register("m", b"two", config()).unwrap();
    assert_eq!(second.version, 2);
    store.register("n", b"one", config()).unwrap();
    drop(store);
    let store = Store::open(folder.path()).unwrap();
    assert_eq!(store.find("m", None).unwrap(), Some(second.clone()));
    assert_eq!(store.read(&second).unwrap(), b"two");
    assert_eq!(store.list().unwrap().len(), 3);
    assert!(store.remove("m", 2).unwrap());
    assert!(!store.remove("m", 2).unwrap());
    // The bytes of the other version are shared with "n" and are kept.
    let first = store.find("m", None).unwrap().unwrap();
    assert_eq!(store.read(&first).unwrap(), b"one");
    assert!(!store.path_of(&second).exists());
    // Numbers are not used twice, so that no cache takes one version for another.
    assert_eq!(store.register("m", b"three", config()).unwrap().version, 3);
}

#[test]
fn files_of_others_are_never_removed() {
    let folder = tempfile::tempdir().unwrap();
    let models = folder.path().join("models");
    fs::create_dir(&models).unwrap();
    fs::write(models.join("mine.onnx"), b"of the user").unwrap();
    for _ in 0..3 {
        let store = Store::open(folder.path()).unwrap();
        let added = store.register("m", b"one", config()).unwrap();
        store.remove("m", added.version).unwrap();
    }
    assert_eq!(fs::read(models.join("mine.onnx")).unwrap(), b"of the user");
    // Not even in the registry's own folder.
    let foreign = folder.path().join("registry/files/notes.txt");
    fs::write(&foreign, b"of the user").unwrap();
    drop(Store::open(folder.path()).unwrap());
    assert!(foreign.exists());
}

#[test]
fn what_an_interrupted_registration_left_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    drop(Store::open(folder.path()).unwrap());
    let files = folder.path().join("registry/files");
    let partial = files.join(".x.onnx.0123456789abcdef.partial");
    let orphan = files.join(format!("{}.onnx", "ab".repeat(32)));
    fs::write(&partial, b"half").unwrap();
    fs::write(&orphan, b"whole").unwrap();
    drop(Store::open(folder.path()).unwrap());
    assert!(!partial.exists() && !orphan.exists());
}

#[test]
fn a_lost_or_empty_database_removes_no_model_and_is_rebuilt() {
    for empty in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        let manifest = store.register("m", b"one", config()).unwrap();
        let path = store.path_of(&manifest);
        drop(store);
        match empty {
            true => fs::write(folder.path().join(DATABASE), b"").unwrap(),
            false => fs::remove_file(folder.path().join(DATABASE)).unwrap(),
        }
        for _ in 0..2 {
            let error = Store::open(folder.path()).err().unwrap();
            assert!(matches!(error, StoreError::Lost { models: 1, .. }), "{error}");
            assert!(error.to_string().contains("atoll registry repair"), "{error}");
            assert!(path.exists());
        }
        let report = repair(folder.path()).unwrap();
        assert_eq!(report.restored, ["m:1"]);
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(store.read(&store.find("m", None).unwrap().unwrap()).unwrap(), b"one");
        assert_eq!(store.check().unwrap().problems, Vec::<String>::new());
    }
}

#[test]
fn an_unreadable_database_removes_no_model_and_is_rebuilt() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let manifest = store.register("m", b"one", config()).unwrap();
    store.register("m", b"two", config()).unwrap();
    drop(store);
    fs::write(folder.path().join(DATABASE), b"this is no database".repeat(1000)).unwrap();
    let error = Store::open(folder.path()).err().unwrap();
    assert!(matches!(error, StoreError::Unreadable { .. }), "{error}");
    let report = repair(folder.path()).unwrap();
    assert!(report.moved_database.unwrap().exists());
    assert_eq!(report.restored, ["m:1", "m:2"]);
    let store = Store::open(folder.path()).unwrap();
    assert_eq!(store.read(&manifest).unwrap(), b"one");
    assert_eq!(store.find("m", None).unwrap().unwrap().version, 2);
}

#[test]
fn an_older_database_removes_no_newer_model() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    store.register("m", b"one", config()).unwrap();
    drop(store);
    let backup = fs::read(folder.path().join(DATABASE)).unwrap();
    let store = Store::open(folder.path()).unwrap();
    let newer = store.register("m", b"two", config()).unwrap();
    let path = store.path_of(&newer);
    drop(store);
    fs::write(folder.path().join(DATABASE), backup).unwrap();
    let store = Store::open(folder.path()).unwrap();
    assert!(path.exists());
    assert!(store.notes()[0].contains("atoll registry repair"), "{:?}", store.notes());
    drop(store);
    assert_eq!(repair(folder.path()).unwrap().restored, ["m:2"]);
    assert_eq!(Store::open(folder.path()).unwrap().find("m", None).unwrap(), Some(newer));
}

#[test]
fn files_of_another_registry_are_refused() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for folder in [&a, &b] {
        Store::open(folder.path()).unwrap().register("m", b"one", config()).unwrap();
    }
    fs::copy(a.path().join(DATABASE), b.path().join(DATABASE)).unwrap();
    assert!(matches!(Store::open(b.path()), Err(StoreError::Foreign { .. })));
    assert!(matches!(repair(b.path()), Err(StoreError::Foreign { .. })));
    // Without a marker nothing is known: the registry opens, but removes nothing.
    fs::remove_file(b.path().join("registry/OWNER")).unwrap();
    let orphan = b.path().join(format!("registry/files/{}.onnx", "cd".repeat(32)));
    fs::write(&orphan, b"of the other").unwrap();
    let store = Store::open(b.path()).unwrap();
    assert!(orphan.exists());
    assert!(store.notes()[0].contains("marker"), "{:?}", store.notes());
}

#[test]
fn a_registry_of_an_older_release_is_taken_over() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    let manifest = store.register("m", b"one", config()).unwrap();
    // The layout of the older release: contents in `models`, no folder of its own.
    store
        .update(|transaction| {
            transaction.open_table(FACTS).map_err(database)?.remove(IDENTITY).map_err(database)?;
            Ok(())
        })
        .unwrap();
    let path = store.path_of(&manifest);
    drop(store);
    let legacy = folder.path().join("models");
    fs::create_dir(&legacy).unwrap();
    fs::rename(&path, legacy.join(path.file_name().unwrap())).unwrap();
    fs::write(legacy.join("mine.onnx"), b"of the user").unwrap();
    fs::remove_dir_all(folder.path().join("registry")).unwrap();
    let store = Store::open(folder.path()).unwrap();
    assert_eq!(store.read(&manifest).unwrap(), b"one");
    assert_eq!(names(&legacy), ["mine.onnx"]);
}

#[test]
fn damaged_files_and_invalid_names_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    assert!(matches!(store.register("../m", b"x", config()), Err(StoreError::BadName(_))));
    let manifest = store.register("m", b"fine", config()).unwrap();
    fs::write(store.path_of(&manifest), b"not").unwrap();
    assert!(matches!(store.read(&manifest), Err(StoreError::Damaged { .. })));
    assert_eq!(store.check().unwrap().problems.len(), 1);
    // Registering the same content again repairs the file.
    store.register("m", b"fine", config()).unwrap();
    assert_eq!(store.read(&manifest).unwrap(), b"fine");
    assert_eq!(store.check().unwrap().problems.len(), 0);
}

#[test]
fn a_failed_registration_leaves_nothing_and_the_registry_works() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path()).unwrap();
    store.register("m", b"one", config()).unwrap();
    // The copy of the record cannot be written: the last step fails.
    let taken = folder.path().join("registry/records/m@2.json");
    fs::create_dir(&taken).unwrap();
    assert!(store.register("m", b"two", config()).is_err());
    assert_eq!(store.find("m", None).unwrap().unwrap().version, 1);
    assert_eq!(names(&folder.path().join("registry/files")).len(), 1);
    fs::remove_dir(&taken).unwrap();
    assert!(store.register("m", b"two", config()).is_ok());
}

#[test]
fn old_versions_are_rolled_back_to_and_expire() {
    let folder = tempfile::tempdir().unwrap();
    let limits = RegistryLimits { keep_versions: 3, ..RegistryLimits::default() };
    let store = Store::open_with(folder.path(), limits).unwrap();
    for version in 1..=5u64 {
        store.register("m", &[version as u8], config()).unwrap();
    }
    assert_eq!(store.versions("m").unwrap(), [3, 4, 5]);
    assert_eq!(names(&folder.path().join("registry/files")).len(), 3);
    let current = |store: &Store| store.find("m", None).unwrap().unwrap().version;
    assert_eq!(store.roll_back("m", None).unwrap().unwrap().version, 4);
    assert_eq!(current(&store), 4);
    drop(store);
    let store = Store::open_with(folder.path(), limits).unwrap();
    assert_eq!(current(&store), 4);
    assert_eq!(store.roll_back("m", None).unwrap().unwrap().version, 3);
    assert_eq!(store.roll_back("m", None).unwrap(), None);
    assert_eq!(store.roll_back("m", Some(1)).unwrap(), None);
    assert_eq!(store.roll_back("m", Some(5)).unwrap().unwrap().version, 5);
    store.roll_back("m", Some(3)).unwrap();
    // A registration is in force at once; the version that was rolled back to expires.
    assert_eq!(store.register("m", b"six", config()).unwrap().version, 6);
    assert_eq!((current(&store), store.versions("m").unwrap()), (6, vec![4, 5, 6]));
    assert_eq!(store.remove_all("m").unwrap(), 3);
    assert_eq!(names(&folder.path().join("registry/files")).len(), 0);
    assert_eq!(names(&folder.path().join("registry/records")).len(), 0);
}

#[test]
fn quotas_refuse_what_exceeds_them() {
    let folder = tempfile::tempdir().unwrap();
    let limits =
        RegistryLimits { keep_versions: 2, max_names: 2, max_bytes: 100, max_name_bytes: 70 };
    let store = Store::open_with(folder.path(), limits).unwrap();
    let full = |name: &str, content: &[u8]| match store.register(name, content, config()) {
        Err(StoreError::Full(why)) => why,
        other => panic!("{other:?}"),
    };
    store.register("a", &[1; 30], config()).unwrap();
    assert!(full("a", &[2; 41]).contains("--registry-max-model-size"));
    store.register("a", &[2; 30], config()).unwrap();
    // The oldest version expires with this one, so it fits.
    store.register("a", &[3; 30], config()).unwrap();
    assert!(full("b", &[4; 41]).contains("--registry-max-size"));
    store.register("b", &[4; 40], config()).unwrap();
    assert!(full("c", &[5; 1]).contains("--registry-max-models"));
    // What is shared is counted once.
    store.register("b", &[3; 30], config()).unwrap();
    store.remove_all("a").unwrap();
    store.register("c", &[5; 1], config()).unwrap();
}

#[test]
fn an_export_can_be_imported_and_served() {
    let (a, b) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let store = Store::open(a.path()).unwrap();
    let labelled = ModelConfig { labels: vec!["cat".into(), "dog".into()], ..config() };
    store.register("m", b"one", config()).unwrap();
    store.register("m", b"two", labelled.clone()).unwrap();
    store.register("m", b"three", labelled).unwrap();
    store.register("n", b"one", config()).unwrap();
    store.roll_back("m", None).unwrap();
    let to = a.path().join("export");
    assert_eq!(store.export(&to, None).unwrap(), 4);
    assert!(store.export(&to, None).is_err(), "the folder is not empty");
    let other = Store::open(b.path()).unwrap();
    let report = other.import(&to).unwrap();
    assert_eq!(report.added, ["m:1", "m:2", "m:3", "n:1"]);
    assert_eq!(other.list().unwrap(), store.list().unwrap());
    assert_eq!(other.find("m", None).unwrap().unwrap().version, 2);
    assert_eq!(other.import(&to).unwrap().present.len(), 4);
    // An export is a model repository, too.
    let list = crate::repository::Repository::open(&to).unwrap();
    assert_eq!(list.find("m", Some(2)).unwrap().config().unwrap().labels, ["cat", "dog"]);
    fs::remove_file(to.join("registry.json")).unwrap();
    assert_eq!(other.import(&to).unwrap().added.len(), 3);
    let damaged = tempfile::tempdir().unwrap();
    store.export(&damaged.path().join("x"), Some("n")).unwrap();
    fs::write(damaged.path().join("x/n/1/model.onnx"), b"other").unwrap();
    assert!(other.import(&damaged.path().join("x")).is_err());
}
